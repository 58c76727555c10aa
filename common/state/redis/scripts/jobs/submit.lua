-- uses: phase readers
-- A new job. What it runs stands apart: those who work on a job may not change that. The numbers
-- that the gate needs stand beside the document, so that no script has to read it.
local seen = previous_reply()
if seen then return seen end
local job = KEYS[1] .. ':job'
if redis.call('EXISTS', job) == 1 then
  return reject('refused', 'there is a job ' .. args.job .. ' already')
end
local STORE_MS = 600000 -- a weight store lets go in seconds, if there is one
local in_store = redis.call('ZSCORE', MESH .. ':jobs:in_store', args.job)
if redis.call('ZSCORE', MESH .. ':jobs:deleting', args.job)
  or in_store and tonumber(in_store) > NOW - STORE_MS then
  return reject('refused',
    'what an earlier job ' .. args.job .. ' has left is being deleted: try again')
end
redis.call('HSET', KEYS[1] .. ':submission', 'document', args.document, 'run_dir', args.run_dir)
redis.call('HSET', job, 'digest', args.digest,
  'created_ms', NOW, 'phase', args.phase, 'error', '', 'block_reason', '', 'blocked_since_ms', NOW,
  'progress_ms', NOW,
  'groups_per_step', args.groups_per_step,
  'group_size', args.group_size, 'max_staleness', args.max_staleness,
  'budget_steps', args.budget_steps,
  'lineage', args.lineage, 'version', args.version, 'manifest', args.manifest,
  'checkpoint', args.checkpoint,
  'steps_done', args.steps_done, 'checkpointed_version', args.checkpointed_version,
  'cursor', args.cursor, 'next_group', args.next_group,
  'admitted', args.admitted, 'opened', args.counts.opened, 'trained', args.counts.trained,
  'filtered', args.counts.filtered, 'stale_requeued', args.counts.stale_requeued,
  'host_lost', args.counts.host_lost, 'typed_drops', args.counts.typed_drops)
for field, value in pairs(args.retained_fields or {}) do redis.call('HSET', job, field, value) end
for _, prompt in ipairs(args.requeue) do
  redis.call('RPUSH', KEYS[1] .. ':requeue', prompt .. ':0')
end
redis.call('ZADD', MESH .. ':jobs', NOW, args.job)
redis.call('ZREM', MESH .. ':jobs:in_store', args.job)
redis.call('ZADD', MESH .. (PHASE_ORDER[args.phase] == 5 and ':jobs:ended' or ':jobs:active'), NOW,
  args.job)
retain_for_recorder(args.job, append_event(args.why, {job = args.job, run_dir = args.run_dir,
  lineage = args.lineage,
  version = args.version}, args.extra))
return reply({submitted = true})
