-- Takes the file's write lock, for a transaction that may have begun as a reader. $1 resource
update fencerow_fence
   set last_token = last_token
 where resource = $1
