-- ?1 resource, ?2 1 if the counter has forgotten, else 0
--
-- Invariant: only inside `begin immediate`, after the lease was found to be the owner's.
update lease
   set forgotten = max(forgotten, ?2),
       owner = null,
       token = null,
       boot = null,
       ends_ms = null,
       ttl_ms = null,
       since_ms = null,
       host = null,
       process = null,
       label = null
 where resource = ?1
