-- ?1 resource, ?2 token
--
-- Invariant: only inside `begin immediate`, after the lease was found to be the owner's. The
-- counter never goes back.
update lease
   set token = ?2,
       counter = max(coalesce(counter, 0), ?2),
       forgotten = 0
 where resource = ?1
