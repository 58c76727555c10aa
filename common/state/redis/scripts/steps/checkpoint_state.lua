-- uses: groups
-- Answers the state that a checkpoint must contain to restore the job after a loss of Redis. The
-- checkpoint is written before its step commits, so the groups of that step count as trained.
local job = read_hash(JOB .. ':job')
if not job.version then return reject('not_found', 'there is no job ' .. args.job) end
local counts = {}
for _, field in ipairs(args.counts) do counts[field] = tonumber(job[field]) end
local filtered, step_groups = {}, {}
for _, group in ipairs(args.filtered) do filtered[group] = true end
for _, group in ipairs(args.groups) do
  local row = redis.call('HMGET', group_key(group), 'state', 'samples', 'scored')
  if row[1] ~= 'leased' then return reject('refused', 'group ' .. group .. ' is not leased') end
  local field = filtered[group] and 'filtered' or 'trained'
  counts[field] = counts[field] + tonumber(row[3])
  counts.typed_drops = counts.typed_drops + tonumber(row[2]) - tonumber(row[3])
  step_groups[group] = true
end
local prompts, in_flight = {}, 0
for _, entry in ipairs(redis.call('LRANGE', JOB .. ':requeue', 0, -1)) do
  prompts[#prompts + 1] = tonumber(string.match(entry, '^%d+'))
end
for _, state in ipairs({'leased', 'ready', 'open'}) do
  for _, group in ipairs(redis.call('ZRANGE', index_key(state), 0, -1)) do
    if not step_groups[tonumber(group)] then
      local row = redis.call('HMGET', group_key(group), 'prompt', 'samples')
      prompts[#prompts + 1] = tonumber(row[1])
      in_flight = in_flight + tonumber(row[2])
    end
  end
end
local kept = {initial_manifest = job.initial_manifest or '',
  best_version = job.best_version or '-1', best_manifest = job.best_manifest or '',
  best_value = job.best_value or ''}
for _, field in ipairs({'early_stop', 'full_budget', 'budget_steps'}) do
  if job.early_stop then kept[field] = job[field] end
end
return cjson.encode({lineage = tonumber(job.lineage),
  version = tonumber(job.version) + (#args.groups > 0 and 1 or 0), cursor = tonumber(job.cursor),
  next_group = tonumber(job.next_group), requeue = prompts, in_flight = in_flight, counts = counts,
  phase = job.phase, kept = kept})
