-- Lets a lock last longer, if it is still the owner's.
--
-- KEYS[1]  the lock
-- ARGV[1]  owner
-- ARGV[2]  time to live from now on, in milliseconds, 1 to 2^53 - 1
--
-- Result   1 if the lock is the owner's, else 0 and nothing was written
--
-- Invariant: never makes a lock that is not there. Zero or less would delete it and answer 1.

local lock = redis.call('GET', KEYS[1])
if not lock or string.sub(lock, 1, 36) ~= ARGV[1] then
    return 0
end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
