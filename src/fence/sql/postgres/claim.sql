-- Takes an idempotency key, or reads who has it. See fencerow.claim().
-- $1 scope, $2 key, $3 fingerprint, $4 resource, $5 token, $6 owner
-- One row: fresh, and where it is not, the record's fingerprint, resource and response.
select fresh, seen_fingerprint, seen_resource, response
  from fencerow.claim($1, $2, $3, $4, $5, $6)
