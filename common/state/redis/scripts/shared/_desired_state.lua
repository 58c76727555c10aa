-- What the leader's decisions do to gangs and their residents. Each answers why it does not apply,
-- and has changed nothing then.
local function with_rule(decision, fields)
  fields.rule = decision.rule
  return fields
end

local function remove_request(op)
  if op and op ~= '' then redis.call('HDEL', REQUESTS, op) end
end

-- Workers poll their own record: a raised revision tells them to read their gang's.
local function raise_revisions(workers)
  for _, worker in ipairs(workers) do
    if redis.call('EXISTS', WORKER .. worker) == 1 then
      redis.call('HINCRBY', WORKER .. worker, 'revision', 1)
      update_worker_snapshot(worker)
    end
  end
end

-- The record of each of these workers says which gang it is in, under one new membership.
local function assign_gang(workers, gang, membership)
  for _, worker in ipairs(workers) do
    if redis.call('EXISTS', WORKER .. worker) == 1 then
      redis.call('HSET', WORKER .. worker, 'gang', gang, 'membership', membership)
    end
  end
  raise_revisions(workers)
end

local function form_gang(decision)
  local number = tonumber(string.match(decision.gang, '^g(%d+)$'))
  local formed = tonumber(redis.call('HGET', PLANNER, 'formed') or '0')
  if not number or number < formed then
    return decision.gang .. ' is no gang that is yet to come'
  end
  local membership = 0
  for _, worker in ipairs(decision.workers) do
    local row = redis.call('HMGET', WORKER .. worker, 'gang', 'membership')
    if not row[1] then return 'there is no worker ' .. worker end
    if row[1] ~= '' then return worker .. ' is in ' .. row[1] end
    membership = math.max(membership, tonumber(row[2]))
  end
  redis.call('HSET', PLANNER, 'formed', number + 1)
  redis.call('HSET', GANG .. decision.gang, 'workers', cjson.encode(decision.workers), 'membership',
    membership + 1, 'formed_ms', NOW, 'next_instance', 0)
  redis.call('ZADD', GANGS, number, decision.gang)
  assign_gang(decision.workers, decision.gang, membership + 1)
  update_gang_snapshot(decision.gang)
  append_event('gang', with_rule(decision, {gang = decision.gang, workers = decision.workers,
    formed = true, dissolved = false}),
    decision.extra)
end

-- `was` is the resident's row, of which nothing is left after this.
local function delete_instance(decision, gang, instance, was, workers)
  local key = GANG .. gang
  for _, rank in ipairs(was.ranks) do
    redis.call('HDEL', key, 'report:' .. instance .. ':' .. rank)
  end
  redis.call('HDEL', key, 'instance:' .. instance)
  redis.call('HDEL', MOVES, instance)
  append_event('desired', {gang = gang, resident = instance, job = was.job, role = 'idle',
    core = false,
    tier = 'absent', generation = was.generation, epoch = was.epoch, reason = decision.rule,
    pinned = false, workers = workers, from_role = was.role, from_job = was.job, token = args.token,
    op = decision.request_id or ''}, decision.extra)
end

local function dissolve_gang(decision)
  local workers = workers_of(decision.gang)
  if not workers then return 'there is no gang ' .. decision.gang end
  for field, text in pairs(read_hash(GANG .. decision.gang)) do
    local instance = string.match(field, '^instance:(.+)$')
    if instance then
      delete_instance(decision, decision.gang, instance, cjson.decode(text), workers)
    end
  end
  local membership = tonumber(redis.call('HGET', GANG .. decision.gang, 'membership'))
  redis.call('DEL', GANG .. decision.gang)
  redis.call('ZREM', GANGS, decision.gang)
  update_gang_snapshot(decision.gang)
  assign_gang(workers, '', membership + 1)
  append_event('gang', with_rule(decision, {gang = decision.gang, workers = workers,
    formed = false, dissolved = true}),
    decision.extra)
end

local function place_instance(decision)
  local key, field = GANG .. decision.gang, 'instance:' .. decision.instance
  local row = redis.call('HMGET', key, 'workers', field, 'next_instance')
  if not row[1] then return 'there is no gang ' .. decision.gang end
  local workers, before = cjson.decode(row[1]), row[2] and cjson.decode(row[2])
  for _, rank in ipairs(decision.ranks) do
    if not workers[rank + 1] then return decision.gang .. ' has no rank ' .. rank end
  end
  if before then
    if decision.generation < before.generation or decision.epoch < before.epoch then
      return decision.instance .. ' is at generation ' .. before.generation .. ' and epoch '
        .. before.epoch .. ' already'
    end
    local kept = {}
    for _, rank in ipairs(decision.ranks) do kept[rank] = true end
    for _, rank in ipairs(before.ranks) do
      if not kept[rank] then
        redis.call('HDEL', key, 'report:' .. decision.instance .. ':' .. rank)
      end
    end
  else
    local gang, number = string.match(decision.instance, '^(.+)%.(%d+)$')
    if gang ~= decision.gang or tonumber(number) < tonumber(row[3]) then
      return decision.instance .. ' is no new instance of ' .. decision.gang
    end
    redis.call('HSET', key, 'next_instance', number + 1)
  end
  redis.call('HSET', key, field, '{"desired_since_ms":' .. string.format('%.0f', NOW) .. ','
    .. string.sub(decision.row, 2))
  remove_request(decision.request_id)
  if decision.move then
    redis.call('HSET', MOVES, decision.instance, decision.move)
  else
    redis.call('HDEL', MOVES, decision.instance)
  end
  update_gang_snapshot(decision.gang)
  raise_revisions(workers)
  append_event('desired', {workers = workers, from_role = before and before.role or 'idle',
    from_job = before and before.job or '', token = args.token, op = decision.request_id},
    decision.extra)
end

local function remove_instance(decision)
  local row = redis.call('HMGET', GANG .. decision.gang, 'workers',
    'instance:' .. decision.instance)
  if not row[2] then return decision.gang .. ' has no instance ' .. decision.instance end
  local workers = cjson.decode(row[1])
  delete_instance(decision, decision.gang, decision.instance, cjson.decode(row[2]), workers)
  remove_request(decision.request_id)
  update_gang_snapshot(decision.gang)
  raise_revisions(workers)
end
