-- uses: exits
-- A process has ended that fails no job by that: told as an event, kept as the last end of its
-- name.
-- Of its job nothing is read but whether it goes on: who tells of it may know no more.
local seen = previous_reply()
if seen then return seen end
local known = args.job ~= '' and redis.call('ZSCORE', MESH .. ':jobs', args.job)
if not known or redis.call('ZSCORE', MESH .. ':jobs:active', args.job) then
  record_exit(read_last_exit())
end
return reply({failed = false})
