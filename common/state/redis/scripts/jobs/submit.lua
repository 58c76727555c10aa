-- uses: phase readers
-- A new job. What it runs stands apart: those who work on a job may not change that. The numbers
-- that the gate needs stand beside the document, so that no script has to read it.
local seen = replayed()
if seen then return seen end
local job = KEYS[1] .. ':job'
if redis.call('EXISTS', job) == 1 then
  return refuse('refused', 'there is a job ' .. a.job .. ' already')
end
local STORE_MS = 600000 -- a weight store lets go in seconds, if there is one
local in_store = redis.call('ZSCORE', MESH .. ':jobs:in_store', a.job)
if redis.call('ZSCORE', MESH .. ':jobs:deleting', a.job)
  or in_store and tonumber(in_store) > NOW - STORE_MS then
  return refuse('refused',
    'what an earlier job ' .. a.job .. ' has left is being deleted: try again')
end
redis.call('HSET', KEYS[1] .. ':given', 'document', a.document, 'run_dir', a.run_dir)
redis.call('HSET', job, 'digest', a.digest,
  'since_ms', NOW, 'phase', a.phase, 'error', '', 'held', '', 'held_ms', NOW, 'progress_ms', NOW,
  'groups_per_step', a.groups_per_step,
  'group_size', a.group_size, 'max_staleness', a.max_staleness, 'budget_steps', a.budget_steps,
  'lineage', a.lineage, 'version', a.version, 'manifest', a.manifest, 'checkpoint', a.checkpoint,
  'steps_done', a.steps_done, 'covered', a.covered, 'cursor', a.cursor, 'next_group', a.next_group,
  'admitted', a.admitted, 'opened', a.counts.opened, 'trained', a.counts.trained,
  'filtered', a.counts.filtered, 'stale_requeued', a.counts.stale_requeued,
  'host_lost', a.counts.host_lost, 'typed_drops', a.counts.typed_drops)
for field, value in pairs(a.kept or {}) do redis.call('HSET', job, field, value) end
for _, prompt in ipairs(a.requeue) do redis.call('RPUSH', KEYS[1] .. ':requeue', prompt .. ':0') end
redis.call('ZADD', MESH .. ':jobs', NOW, a.job)
redis.call('ZREM', MESH .. ':jobs:in_store', a.job)
redis.call('ZADD', MESH .. (ORDER[a.phase] == 5 and ':jobs:ended' or ':jobs:going'), NOW, a.job)
await_recorder(a.job, event(a.why, {job = a.job, run_dir = a.run_dir, lineage = a.lineage,
  version = a.version}, a.extra))
return done({submitted = true})
