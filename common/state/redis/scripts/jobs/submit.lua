-- uses: phase readers
-- Creates a job. Its document is in a separate hash, which the job's processes may not change. The
-- numbers of the staleness gate are repeated beside it, so that no script parses the document.
local previous = previous_reply()
if previous then return previous end
local job = KEYS[1] .. ':job'
if redis.call('EXISTS', job) == 1 then
  return reject('refused', 'there is already a job ' .. args.job)
end
local STORE_RELEASE_MS = 600000 -- a running weight store releases a job in seconds
local in_store = redis.call('ZSCORE', MESH .. ':jobs:in_store', args.job)
if redis.call('ZSCORE', MESH .. ':jobs:deleting', args.job)
  or in_store and tonumber(in_store) > NOW - STORE_RELEASE_MS then
  return reject('refused',
    'data of an earlier job ' .. args.job .. ' are being deleted: try again')
end
redis.call('HSET', KEYS[1] .. ':submission', 'document', args.document, 'run_dir', args.run_dir)
redis.call('HSET', job, 'digest', args.digest, 'created_ms', NOW, 'phase', args.phase,
  'error', '', 'block_reason', '', 'blocked_since_ms', NOW, 'progress_ms', NOW,
  'groups_per_step', args.groups_per_step, 'group_size', args.group_size,
  'max_staleness', args.max_staleness, 'budget_steps', args.budget_steps,
  'lineage', args.lineage, 'version', args.version, 'manifest', args.manifest,
  'checkpoint', args.checkpoint, 'steps_done', args.steps_done,
  'checkpointed_version', args.checkpointed_version, 'cursor', args.cursor,
  'next_group', args.next_group, 'admitted', args.admitted, 'opened', args.counts.opened,
  'trained', args.counts.trained, 'filtered', args.counts.filtered,
  'stale_requeued', args.counts.stale_requeued, 'host_lost', args.counts.host_lost,
  'typed_drops', args.counts.typed_drops)
for field, value in pairs(args.retained_fields or {}) do redis.call('HSET', job, field, value) end
for _, prompt in ipairs(args.requeue) do
  redis.call('RPUSH', KEYS[1] .. ':requeue', prompt .. ':0')
end
redis.call('ZADD', MESH .. ':jobs', NOW, args.job)
redis.call('ZREM', MESH .. ':jobs:in_store', args.job)
local index = MESH .. (PHASE_ORDER[args.phase] == 5 and ':jobs:ended' or ':jobs:active')
redis.call('ZADD', index, NOW, args.job)
local event_id = append_event(args.why, {job = args.job, run_dir = args.run_dir,
  lineage = args.lineage, version = args.version}, args.extra)
retain_for_recorder(args.job, event_id)
return reply({submitted = true})
