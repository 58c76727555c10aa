-- uses: readers
-- A new job. The numbers that the gate needs stand beside the document, so that no script has to
-- read it.
local seen = replayed()
if seen then return seen end
local job = KEYS[1] .. ':job'
if redis.call('EXISTS', job) == 1 then
  return refuse('refused', 'there is a job ' .. a.job .. ' already')
end
redis.call('HSET', job, 'document', a.document, 'run_dir', a.run_dir, 'phase', a.phase,
  'error', '', 'progress_ms', NOW, 'groups_per_step', a.groups_per_step,
  'group_size', a.group_size, 'max_staleness', a.max_staleness, 'budget_steps', a.budget_steps,
  'lineage', a.lineage, 'version', a.version, 'manifest', a.manifest, 'checkpoint', a.checkpoint,
  'steps_done', a.steps_done, 'covered', a.covered, 'cursor', a.cursor, 'next_group', a.next_group,
  'admitted', a.admitted, 'opened', a.counts.opened, 'trained', a.counts.trained,
  'filtered', a.counts.filtered, 'stale_requeued', a.counts.stale_requeued,
  'host_lost', a.counts.host_lost, 'typed_drops', a.counts.typed_drops)
for field, value in pairs(a.kept or {}) do redis.call('HSET', job, field, value) end
for _, prompt in ipairs(a.requeue) do redis.call('RPUSH', KEYS[1] .. ':requeue', prompt .. ':0') end
redis.call('ZADD', MESH .. ':jobs', NOW, a.job)
await_recorder(a.job, event(a.why, {job = a.job, run_dir = a.run_dir, lineage = a.lineage,
  version = a.version}, a.extra))
return done({submitted = true})
