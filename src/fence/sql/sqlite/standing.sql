-- Where the fence stands. $1 resource; no row or (last_token, owner).
select last_token, owner
  from fencerow_fence
 where resource = $1
