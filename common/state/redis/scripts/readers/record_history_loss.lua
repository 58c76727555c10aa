-- uses: readers groups
-- Records that a job's recorder has missed events up to `through`, which were trimmed. The appended
-- event has the state of the job's trajectories from the rows, and accounting continues from it.
-- Groups of steps that may yet be abandoned are listed with their step.
local job = read_hash(JOB .. ':job')
if not job.version then return reject('not_found', 'there is no job ' .. args.job) end
local counts = {}
for _, field in ipairs(args.counts) do counts[field] = tonumber(job[field]) end
local steps, in_flight = {}, {}
local uncovered = '(' .. job.checkpointed_version
for _, id in ipairs(redis.call('ZRANGEBYSCORE', JOB .. ':steps', uncovered, '+inf')) do
  local step_groups = {}
  for n, row in ipairs(cjson.decode(redis.call('HGET', JOB .. ':step:' .. id, 'groups'))) do
    local samples, scored = tonumber(row.samples), tonumber(row.scored)
    local filtered = string.sub(row.state, 1, 7) ~= 'trained'
    local field = filtered and 'filtered' or 'trained'
    counts[field] = counts[field] - scored
    counts.typed_drops = counts.typed_drops + scored - samples
    step_groups[n] = {group = row.group, samples = samples, scored = scored, filtered = filtered}
  end
  steps[#steps + 1] = {step = tonumber(string.match(id, '%d+$')), groups = step_groups}
end
for _, state in ipairs({'open', 'ready', 'leased'}) do
  for _, group in ipairs(redis.call('ZRANGE', index_key(state), 0, -1)) do
    in_flight[#in_flight + 1] = {group = tonumber(group), ready = state ~= 'open',
      samples = tonumber(redis.call('HGET', group_key(group), 'samples'))}
  end
end
append_event('history_lost', {job = args.job, reader = args.name, since = args.since,
  through = args.through, version = tonumber(job.version), counts = counts, steps = steps,
  in_flight = in_flight})
local row = read_reader(args.name) or {joined_ms = NOW}
row.cursor, row.done, row.location, row.last_seen_ms, row.has_left = args.through, args.through,
  args.location, NOW, nil
write_reader(args.name, row)
return cjson.encode({from = args.through})
