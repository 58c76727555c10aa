-- What the leader's decisions do to gangs and their residents. Each answers why it does not apply,
-- and has changed nothing then.
local function why(d, fields)
  fields.rule = d.rule
  return fields
end

local function settled(op)
  if op and op ~= '' then redis.call('HDEL', REQUESTS, op) end
end

-- Workers poll their own record: a raised revision tells them to read their gang's.
local function touch(workers)
  for _, worker in ipairs(workers) do
    if redis.call('EXISTS', WORKER .. worker) == 1 then
      redis.call('HINCRBY', WORKER .. worker, 'revision', 1)
      show_worker(worker)
    end
  end
end

-- The record of each of these workers says which gang it is in, under one new membership.
local function enlist(workers, gang, membership)
  for _, worker in ipairs(workers) do
    if redis.call('EXISTS', WORKER .. worker) == 1 then
      redis.call('HSET', WORKER .. worker, 'gang', gang, 'membership', membership)
    end
  end
  touch(workers)
end

local function form(d)
  local number = tonumber(string.match(d.gang, '^g(%d+)$'))
  local formed = tonumber(redis.call('HGET', POOL, 'formed') or '0')
  if not number or number < formed then return d.gang .. ' is no gang that is yet to come' end
  local membership = 0
  for _, worker in ipairs(d.workers) do
    local row = redis.call('HMGET', WORKER .. worker, 'gang', 'membership')
    if not row[1] then return 'there is no worker ' .. worker end
    if row[1] ~= '' then return worker .. ' is in ' .. row[1] end
    membership = math.max(membership, tonumber(row[2]))
  end
  redis.call('HSET', POOL, 'formed', number + 1)
  redis.call('HSET', GANG .. d.gang, 'workers', cjson.encode(d.workers), 'membership',
    membership + 1, 'formed_ms', NOW, 'placed', 0)
  redis.call('ZADD', GANGS, number, d.gang)
  enlist(d.workers, d.gang, membership + 1)
  show_gang(d.gang)
  event('gang', why(d, {gang = d.gang, workers = d.workers, formed = true, dissolved = false}),
    d.extra)
end

-- `was` is the resident's row, of which nothing is left after this.
local function strike(d, gang, resident, was, workers)
  local key = GANG .. gang
  for _, rank in ipairs(was.ranks) do
    redis.call('HDEL', key, 'report:' .. resident .. ':' .. rank)
  end
  redis.call('HDEL', key, 'resident:' .. resident)
  redis.call('HDEL', MOVING, resident)
  event('desired', {gang = gang, resident = resident, job = was.job, role = 'idle', core = false,
    tier = 'absent', generation = was.generation, epoch = was.epoch, reason = d.rule,
    pinned = false, workers = workers, from_role = was.role, from_job = was.job, token = a.token,
    op = d.op or ''}, d.extra)
end

local function dissolve(d)
  local workers = workers_of(d.gang)
  if not workers then return 'there is no gang ' .. d.gang end
  for field, text in pairs(hash(GANG .. d.gang)) do
    local resident = string.match(field, '^resident:(.+)$')
    if resident then strike(d, d.gang, resident, cjson.decode(text), workers) end
  end
  local membership = tonumber(redis.call('HGET', GANG .. d.gang, 'membership'))
  redis.call('DEL', GANG .. d.gang)
  redis.call('ZREM', GANGS, d.gang)
  show_gang(d.gang)
  enlist(workers, '', membership + 1)
  event('gang', why(d, {gang = d.gang, workers = workers, formed = false, dissolved = true}),
    d.extra)
end

local function place(d)
  local key, field = GANG .. d.gang, 'resident:' .. d.resident
  local row = redis.call('HMGET', key, 'workers', field, 'placed')
  if not row[1] then return 'there is no gang ' .. d.gang end
  local workers, before = cjson.decode(row[1]), row[2] and cjson.decode(row[2])
  for _, rank in ipairs(d.ranks) do
    if not workers[rank + 1] then return d.gang .. ' has no rank ' .. rank end
  end
  if before then
    if d.generation < before.generation or d.epoch < before.epoch then
      return d.resident .. ' is at generation ' .. before.generation .. ' and epoch '
        .. before.epoch .. ' already'
    end
    local kept = {}
    for _, rank in ipairs(d.ranks) do kept[rank] = true end
    for _, rank in ipairs(before.ranks) do
      if not kept[rank] then redis.call('HDEL', key, 'report:' .. d.resident .. ':' .. rank) end
    end
  else
    local gang, number = string.match(d.resident, '^(.+)%.(%d+)$')
    if gang ~= d.gang or tonumber(number) < tonumber(row[3]) then
      return d.resident .. ' is no resident that is yet to come to ' .. d.gang
    end
    redis.call('HSET', key, 'placed', number + 1)
  end
  redis.call('HSET', key, field, '{"changed_ms":' .. string.format('%.0f', NOW) .. ','
    .. string.sub(d.row, 2))
  settled(d.op)
  if d.move then
    redis.call('HSET', MOVING, d.resident, d.move)
  else
    redis.call('HDEL', MOVING, d.resident)
  end
  show_gang(d.gang)
  touch(workers)
  event('desired', {workers = workers, from_role = before and before.role or 'idle',
    from_job = before and before.job or '', token = a.token, op = d.op}, d.extra)
end

local function remove(d)
  local row = redis.call('HMGET', GANG .. d.gang, 'workers', 'resident:' .. d.resident)
  if not row[2] then return d.gang .. ' has no resident ' .. d.resident end
  local workers = cjson.decode(row[1])
  strike(d, d.gang, d.resident, cjson.decode(row[2]), workers)
  settled(d.op)
  show_gang(d.gang)
  touch(workers)
end
