-- $1 resource, $2 owner, $3 time to live in ms, $4 host, $5 process, $6 label
-- One row: outcome, token, remaining_ms; see fencerow.acquire_lease.
select outcome, token, remaining_ms
  from fencerow.acquire_lease($1, $2, $3, $4, $5, $6)
