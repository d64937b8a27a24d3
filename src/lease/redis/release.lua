-- Frees a lock, if it is still the owner's. The counter stays.
--
-- KEYS[1]  the lock
-- ARGV[1]  owner
--
-- Result   1 if the lock was the owner's, else 0 and nothing was written
--
-- Invariant: looking and deleting are one step, so that a late release never frees a successor's lock.

local lock = redis.call('GET', KEYS[1])
if not lock or string.sub(lock, 1, 36) ~= ARGV[1] then
    return 0
end
return redis.call('DEL', KEYS[1])
