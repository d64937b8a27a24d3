-- $1 resource
-- One row, or none if the resource is free; see fencerow.lease_holder.
select owner, token, since_ms, remaining_ms, host, process, label
  from fencerow.lease_holder($1)
