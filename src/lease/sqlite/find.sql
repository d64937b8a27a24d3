-- ?1 resource
-- One row, or none if it was never held.
select counter, forgotten, owner, token, boot, ends_ms, ttl_ms, since_ms, host, process, label
  from lease
 where resource = ?1
