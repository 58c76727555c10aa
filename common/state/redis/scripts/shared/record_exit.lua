-- uses: exits
-- Records an exit that does not fail a job, as an event and as the last exit of its name. Skipped
-- if the job has ended. The script reads nothing else of the job, because some callers may not read
-- its row.
local previous = previous_reply()
if previous then return previous end
local is_known = args.job ~= '' and redis.call('ZSCORE', MESH .. ':jobs', args.job)
if not is_known or redis.call('ZSCORE', MESH .. ':jobs:active', args.job) then
  record_exit(read_last_exit())
end
return reply({failed = false})
