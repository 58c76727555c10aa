-- uses: groups
-- The staleness gate: what is admitted now trains at most `max_staleness` versions later, because
-- every step takes `groups_per_step` of what was admitted, oldest first. Groups beyond the budget
-- are not opened, and none while the job is paused.
local seen = replayed()
if seen then return seen end
if not holds(a.shard, a.token) then return fenced(a.shard) end
local job = hash(JOB .. ':job')
if not job.phase then return refuse('not_found', 'there is no job ' .. a.job) end
local version, size = tonumber(job.version), tonumber(job.group_size)
local paused = string.sub(job.held or '', 1, 7) == 'paused:'
if job.phase ~= 'training' or version < 0 or paused then return unchanged({groups = {}}) end

local steps = math.min(tonumber(job.max_staleness) + version + 1, tonumber(job.budget_steps))
local capacity = steps * tonumber(job.groups_per_step) - tonumber(job.admitted)
local cursor, first = tonumber(job.cursor), tonumber(job.next_group)
local opened, ids, prompts = {}, {}, {}
for n = 1, math.min(a.want, capacity) do
  local group, prompt, passed = first + n - 1, cursor, '0'
  local again = redis.call('LPOP', JOB .. ':requeue')
  if again then
    prompt, passed = string.match(again, '^(%d+):(%d+)$')
    prompt = tonumber(prompt)
  else
    cursor = cursor + 1
  end
  redis.call('HSET', group_key(group), 'state', 'open', 'shard', a.shard, 'prompt', prompt,
    'version', version, 'samples', size, 'passed', passed)
  redis.call('ZADD', index('open'), group, group)
  opened[n] = {group = group, prompt = prompt, version = version,
    lineage = tonumber(job.lineage)}
  ids[n], prompts[n] = group, prompt
end
if #opened == 0 then return unchanged({groups = opened}) end
redis.call('HSET', JOB .. ':job', 'cursor', cursor, 'next_group', first + #opened)
count('admitted', #opened)
count('opened', #opened * size)
local place = redis.call('HGET', KEYS[1] .. ':shard:' .. a.shard, 'place')
event('opened', {job = a.job, shard = a.shard, version = version, samples = size, groups = ids,
  prompts = prompts, ledger = place and place ~= 'home' and place or nil})
return done({groups = opened})
