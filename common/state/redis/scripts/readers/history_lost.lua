-- uses: readers groups
-- Who records a job finds that events up to `through` are gone which it has not read. What they
-- told of the job's trajectories is told anew, from the rows that are there: the account goes on
-- from this event. Groups of steps that may yet be abandoned are told with their step.
local job = hash(JOB .. ':job')
if not job.version then return refuse('not_found', 'there is no job ' .. a.job) end
local counts = {}
for _, field in ipairs(a.counts) do counts[field] = tonumber(job[field]) end
local steps, in_flight = {}, {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', JOB .. ':steps', '(' .. job.covered, '+inf')) do
  local taken = {}
  for n, row in ipairs(cjson.decode(redis.call('HGET', JOB .. ':step:' .. id, 'groups'))) do
    local samples, scored = tonumber(row.samples), tonumber(row.scored)
    local filtered = string.sub(row.state, 1, 7) ~= 'trained'
    local field = filtered and 'filtered' or 'trained'
    counts[field] = counts[field] - scored
    counts.typed_drops = counts.typed_drops + scored - samples
    taken[n] = {group = row.group, samples = samples, scored = scored, filtered = filtered}
  end
  steps[#steps + 1] = {step = tonumber(string.match(id, '%d+$')), groups = taken}
end
for _, state in ipairs({'open', 'ready', 'leased'}) do
  for _, group in ipairs(redis.call('ZRANGE', index(state), 0, -1)) do
    in_flight[#in_flight + 1] = {group = tonumber(group), ready = state ~= 'open',
      samples = tonumber(redis.call('HGET', group_key(group), 'samples'))}
  end
end
event('history_lost', {job = a.job, reader = a.name, since = a.since, through = a.through,
  version = tonumber(job.version), counts = counts, steps = steps, in_flight = in_flight})
local row = reader(a.name) or {since_ms = NOW}
row.at, row.done, row.where, row.seen_ms, row.left = a.through, a.through, a.where, NOW, nil
keep_reader(a.name, row)
return cjson.encode({from = a.through})
