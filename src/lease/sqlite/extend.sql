-- ?1 resource, ?2 end in ms of this boot, ?3 time to live in ms
--
-- Invariant: only inside `begin immediate`, after the lease was found to be the owner's.
update lease
   set ends_ms = ?2,
       ttl_ms = ?3
 where resource = ?1
