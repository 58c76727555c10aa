-- uses: groups
-- Counts groups and trajectories in each state from the rows, and the groups that the gate would
-- admit.
local counts = {samples = 0}
for _, state in ipairs({'open', 'ready', 'leased'}) do
  local groups = redis.call('ZRANGE', index_key(state), 0, -1)
  counts[state] = #groups
  for _, group in ipairs(groups) do
    counts.samples = counts.samples + tonumber(redis.call('HGET', group_key(group), 'samples'))
  end
end
local job = read_hash(JOB .. ':job')
if not job.version then return reject('not_found', 'there is no job ' .. args.job) end
local steps = math.min(tonumber(job.max_staleness) + tonumber(job.version) + 1,
  tonumber(job.budget_steps))
counts.admissible_groups = steps * tonumber(job.groups_per_step) - tonumber(job.admitted)
return cjson.encode(counts)
