-- The record of a key. $1 scope, $2 key
select fingerprint, resource, response
  from fencerow_idempotency
 where scope = $1
   and key = $2
