-- uses: ended
-- A process has ended that fails no job by that: told as an event, kept as the last end of its
-- name.
-- Of its job nothing is read but whether it goes on: who tells of it may know no more.
local seen = replayed()
if seen then return seen end
local known = a.job ~= '' and redis.call('ZSCORE', MESH .. ':jobs', a.job)
if not known or redis.call('ZSCORE', MESH .. ':jobs:going', a.job) then tell_end(last_end()) end
return done({failed = false})
