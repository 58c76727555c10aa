-- uses: groups
-- Staleness gate: opens up to `want` groups for a shard. Every step takes `groups_per_step`
-- admitted groups, oldest first, so a group trains at most `max_staleness` versions later. Opens
-- none beyond the step budget or while the job is paused.
local previous = previous_reply()
if previous then return previous end
if not has_lease(args.shard, args.token) then return reject_fenced(args.shard) end
local job = read_hash(JOB .. ':job')
if not job.phase then return reject('not_found', 'there is no job ' .. args.job) end
local version, size = tonumber(job.version), tonumber(job.group_size)
local is_paused = string.sub(job.block_reason or '', 1, 7) == 'paused:'
if job.phase ~= 'training' or version < 0 or is_paused then
  return reply_unchanged({groups = {}})
end

local steps = math.min(tonumber(job.max_staleness) + version + 1, tonumber(job.budget_steps))
local capacity = steps * tonumber(job.groups_per_step) - tonumber(job.admitted)
local cursor, first = tonumber(job.cursor), tonumber(job.next_group)
local opened, ids, prompts = {}, {}, {}
for n = 1, math.min(args.want, capacity) do
  local group, prompt, passed = first + n - 1, cursor, '0'
  local requeued = redis.call('LPOP', JOB .. ':requeue')
  if requeued then
    prompt, passed = string.match(requeued, '^(%d+):(%d+)$')
    prompt = tonumber(prompt)
  else
    cursor = cursor + 1
  end
  redis.call('HSET', group_key(group), 'state', 'open', 'shard', args.shard, 'prompt', prompt,
    'version', version, 'samples', size, 'passed', passed)
  redis.call('ZADD', index_key('open'), group, group)
  opened[n] = {group = group, prompt = prompt, version = version,
    lineage = tonumber(job.lineage)}
  ids[n], prompts[n] = group, prompt
end
if #opened == 0 then return reply_unchanged({groups = opened}) end
redis.call('HSET', JOB .. ':job', 'cursor', cursor, 'next_group', first + #opened)
add_count('admitted', #opened)
add_count('opened', #opened * size)
local ledger_place = redis.call('HGET', KEYS[1] .. ':shard:' .. args.shard, 'place')
append_event('opened', {job = args.job, shard = args.shard, version = version, samples = size,
  groups = ids,
  prompts = prompts,
  ledger = ledger_place and ledger_place ~= 'run_host' and ledger_place or nil})
return reply({groups = opened})
