-- A key that this grant has claimed, and given no response. No row, or the key.
-- $1 resource, $2 token, $3 owner
select key
  from fencerow_idempotency
 where response is null
   and resource = $1
   and token = $2
   and owner = $3
 limit 1
