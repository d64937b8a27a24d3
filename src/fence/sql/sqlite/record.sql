-- Stores the response of a key that this grant has claimed.
-- $1 scope, $2 key, $3 token, $4 owner, $5 response
update fencerow_idempotency
   set response = $5
 where scope = $1
   and key = $2
   and token = $3
   and owner = $4
   and response is null
