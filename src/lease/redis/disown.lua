-- Frees a lock, if it is still the owner's, and marks its counter as one that has forgotten.
--
-- KEYS[1]  the lock
-- KEYS[2]  the run that the counter was last seeded in
-- ARGV[1]  owner
--
-- Result   1 if the lock was the owner's, else 0 and nothing was written
--
-- Invariant: the next grant is unnumbered. The counter itself stays: what it holds is still a
-- bound that the next number must be above.

local lock = redis.call('GET', KEYS[1])
if not lock or string.sub(lock, 1, 36) ~= ARGV[1] then
    return 0
end
redis.call('DEL', KEYS[2])
return redis.call('DEL', KEYS[1])
