-- uses: pool phase desired_state
-- Applies the leader's decisions in order, once for an operation. A decision whose preconditions no
-- longer hold is skipped; the answer gives the reason. The whole write is fenced if another write
-- follows the snapshot (revision `after`), because a delayed write may arrive late.
local previous = previous_reply()
if previous then return previous end
if not is_leader(args.election, args.token) then
  return reject_fenced('the leader of ' .. args.election)
end
local revision = tonumber(redis.call('HGET', PLANNER, 'revision') or '0')
if args.after and args.after ~= revision then
  return reject('fenced', 'other decisions were written after the snapshot of these decisions')
end

-- A lost worker's processes have exited with it. A worker with a live lease has joined again.
local function mark_worker_lost(decision)
  local name = worker_name(decision.worker)
  local lease = redis.call('HMGET', MESH .. ':entry:' .. name, 'token', 'expires_ms', 'renewed_ms')
  if redis.call('EXISTS', WORKER .. decision.worker) == 0 then
    return 'there is no worker ' .. decision.worker
  end
  if lease[1] and is_live(lease[2], lease[3]) then return decision.worker .. ' is alive' end
  local lost_lease = (lease[1] or '') .. ' ' .. (lease[2] or '')
  if redis.call('HGET', WORKER .. decision.worker, 'lost') == lost_lease then return end
  redis.call('HSET', WORKER .. decision.worker, 'lost', lost_lease)
  delete_reports(decision.worker)
  -- a worker that is alive after all reads its record and reports again
  redis.call('HINCRBY', WORKER .. decision.worker, 'revision', 1)
  update_worker_snapshot(decision.worker)
  append_event('lost', with_rule(decision, {worker = decision.worker, reason = decision.reason,
    gang = redis.call('HGET', WORKER .. decision.worker, 'gang')}), decision.extra)
end

local function report_host_presence(decision)
  append_event(decision.is_back and 'host_back' or 'host_lost', with_rule(decision,
    {host = decision.host}), decision.extra)
end

-- When a blocked job resumes, its progress time starts again. It could make no progress before, and
-- earlier exits are not charged to it.
local function set_block_reason(decision)
  local key = '{' .. decision.job .. '}:job'
  local row = redis.call('HMGET', key, 'phase', 'block_reason')
  if not row[1] then return 'there is no job ' .. decision.job end
  if PHASE_ORDER[row[1]] == PHASE_ORDER.stopped then return decision.job .. ' has ended' end
  local before = row[2] or ''
  if before == decision.block_reason then return end
  redis.call('HSET', key, 'block_reason', decision.block_reason, 'blocked_since_ms', NOW)
  -- an index of its own, for processes that may not read the job's row
  if string.sub(decision.block_reason, 1, 7) == 'paused:' then
    redis.call('ZADD', MESH .. ':jobs:paused', NOW, decision.job)
  else
    redis.call('ZREM', MESH .. ':jobs:paused', decision.job)
  end
  if decision.block_reason == '' then
    redis.call('HSET', key, 'progress_ms', NOW)
    redis.call('HINCRBY', key, 'resumed', 1)
  end
  append_event('admission', with_rule(decision, {job = decision.job, held = decision.block_reason,
    before = before}), decision.extra)
end

local function set_seeding(decision)
  local key = '{' .. decision.job .. '}:job'
  if redis.call('EXISTS', key) == 0 then return 'there is no job ' .. decision.job end
  redis.call('HSET', key, 'seed_ms', decision.seed_ms)
  append_event('seeding', with_rule(decision, {job = decision.job, seed_ms = decision.seed_ms}),
    decision.extra)
end

local function fail_job(decision)
  local phase = redis.call('HGET', '{' .. decision.job .. '}:job', 'phase')
  if not phase then return 'there is no job ' .. decision.job end
  if PHASE_ORDER[phase] == PHASE_ORDER.stopped then return decision.job .. ' has ended' end
  set_phase('failed', decision.error, decision.job)
end

local function assign_services(decision)
  if redis.call('GET', SERVICES .. decision.host) == decision.row then return end
  redis.call('SET', SERVICES .. decision.host, decision.row)
  redis.call('ZADD', HOSTS, 0, decision.host)
  append_event('services', with_rule(decision, {host = decision.host}), decision.extra)
end

local function finish_move(decision)
  if redis.call('HDEL', MOVES, decision.id) == 1 then
    append_event('move', with_rule(decision, {resident = decision.id, gang = decision.gang,
      started_ms = decision.started_ms, finished_ms = NOW, undone = decision.undone}),
      decision.extra)
  end
end

local function reject_request(decision)
  local text = redis.call('HGET', REQUESTS, decision.request_id)
  if not text then return end
  redis.call('HDEL', REQUESTS, decision.request_id)
  local request = cjson.decode(text)
  local verdict = decision.reason == '' and 'settled' or 'declined'
  if request.kind == 'drain' and verdict == 'declined' then
    redis.call('HDEL', DRAINING, request.host)
  end
  append_event(request.kind .. '_' .. verdict, with_rule(decision, {op = decision.request_id,
    reason = decision.reason, host = request.host}), decision.extra)
end

-- Appends the measured outcome of a move beside its prediction.
local function report_move_outcome(decision)
  append_event('move_judged', with_rule(decision, {job = decision.job}), decision.extra)
end

local APPLY = {
  form_gang = form_gang, dissolve_gang = dissolve_gang,
  place_instance = place_instance, remove_instance = remove_instance,
  mark_worker_lost = mark_worker_lost, report_host_presence = report_host_presence,
  set_block_reason = set_block_reason, set_seeding = set_seeding, fail_job = fail_job,
  assign_services = assign_services,
  finish_move = finish_move, reject_request = reject_request,
  report_move_outcome = report_move_outcome,
}
local rejected = {}
for _, decision in ipairs(args.decisions) do
  local reason = APPLY[decision.kind](decision)
  if reason then rejected[#rejected + 1] = {index = decision.index, reason = reason} end
end
redis.call('HSET', PLANNER, 'revision', revision + 1)
if args.memory then redis.call('HSET', PLANNER, 'memory', args.memory, 'memory_ms', NOW) end
return reply({rejected = rejected, revision = revision + 1})
