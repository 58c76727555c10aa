-- uses: pool phase wishes
-- The leader's decisions, in their order, once for an operation. What a decision presumes may have
-- changed since the look: such a one is left out, and the answer says why. Nothing else may have
-- been written since the look: a write that was long on its way comes too late.
local seen = replayed()
if seen then return seen end
if not leads(a.election, a.token) then return fenced('the leader of ' .. a.election) end
local written = tonumber(redis.call('HGET', POOL, 'written') or '0')
if a.after and a.after ~= written then
  return refuse('fenced', 'these decisions were made before others that have been written since')
end

-- Its processes have gone with it. One that lives under another lease by now has joined again.
local function lose(d)
  local name = worker_process(d.worker)
  local lease = redis.call('HMGET', MESH .. ':entry:' .. name, 'token', 'expires_ms', 'renewed_ms')
  if redis.call('EXISTS', WORKER .. d.worker) == 0 then return 'there is no worker ' .. d.worker end
  if lease[1] and lasts(lease[2], lease[3]) then return d.worker .. ' is there' end
  local lost = (lease[1] or '') .. ' ' .. (lease[2] or '')
  if redis.call('HGET', WORKER .. d.worker, 'lost') == lost then return end
  redis.call('HSET', WORKER .. d.worker, 'lost', lost)
  void_reports(d.worker)
  redis.call('HINCRBY', WORKER .. d.worker, 'revision', 1) -- if it lives after all, it tells again
  show_worker(d.worker)
  event('lost', why(d, {worker = d.worker, reason = d.reason,
    gang = redis.call('HGET', WORKER .. d.worker, 'gang')}), d.extra)
end

local function host_gone(d)
  event(d.back and 'host_back' or 'host_lost', why(d, {host = d.host}), d.extra)
end

-- A job that goes on after it was held begins to be waited for anew: that it made no progress
-- meanwhile, and what ended before, is no fault of its.
local function admit(d)
  local key = '{' .. d.job .. '}:job'
  local row = redis.call('HMGET', key, 'phase', 'held')
  if not row[1] then return 'there is no job ' .. d.job end
  if ORDER[row[1]] == ORDER.stopped then return d.job .. ' has ended' end
  local before = row[2] or ''
  if before == d.held then return end
  redis.call('HSET', key, 'held', d.held, 'held_ms', NOW)
  if string.sub(d.held, 1, 7) == 'paused:' then -- told apart for who may not read the job's row
    redis.call('ZADD', MESH .. ':jobs:paused', NOW, d.job)
  else
    redis.call('ZREM', MESH .. ':jobs:paused', d.job)
  end
  if d.held == '' then
    redis.call('HSET', key, 'progress_ms', NOW)
    redis.call('HINCRBY', key, 'resumed', 1)
  end
  event('admission', why(d, {job = d.job, held = d.held, before = before}), d.extra)
end

local function fail(d)
  local phase = redis.call('HGET', '{' .. d.job .. '}:job', 'phase')
  if not phase then return 'there is no job ' .. d.job end
  if ORDER[phase] == ORDER.stopped then return d.job .. ' has ended' end
  enter_phase('failed', d.error, d.job)
end

local function serve(d)
  if redis.call('GET', SERVICES .. d.host) == d.row then return end
  redis.call('SET', SERVICES .. d.host, d.row)
  redis.call('ZADD', HOSTS, 0, d.host)
  event('services', why(d, {host = d.host}), d.extra)
end

local function finish(d)
  if redis.call('HDEL', MOVING, d.id) == 1 then
    event('move', why(d, {resident = d.id, gang = d.gang, started_ms = d.started_ms,
      finished_ms = NOW, undone = d.undone}), d.extra)
  end
end

local function decline(d)
  local text = redis.call('HGET', REQUESTS, d.op)
  if not text then return end
  redis.call('HDEL', REQUESTS, d.op)
  local asked = cjson.decode(text)
  local verdict = d.reason == '' and 'settled' or 'declined'
  if asked.kind == 'drain' and verdict == 'declined' then
    redis.call('HDEL', DRAINING, asked.host)
  end
  event(asked.kind .. '_' .. verdict, why(d, {op = d.op, reason = d.reason, host = asked.host}),
    d.extra)
end

-- What a move has brought, beside what it was to bring.
local function judge(d)
  event('move_judged', why(d, {job = d.job}), d.extra)
end

local APPLY = {form = form, dissolve = dissolve, place = place, remove = remove, lose = lose,
  host_gone = host_gone, admit = admit, fail = fail, serve = serve, finish = finish,
  decline = decline, judge = judge}
local refused = {}
for _, d in ipairs(a.decisions) do
  local reason = APPLY[d.kind](d)
  if reason then refused[#refused + 1] = {index = d.index, reason = reason} end
end
redis.call('HSET', POOL, 'written', written + 1)
if a.memory then redis.call('HSET', POOL, 'memory', a.memory, 'memory_ms', NOW) end
return done({refused = refused, written = written + 1})
