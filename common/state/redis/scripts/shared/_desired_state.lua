-- Functions that apply the leader's decisions to gangs and their instances. Each returns why a
-- decision does not apply, and has changed nothing then.
local function with_rule(decision, fields)
  fields.rule = decision.rule
  return fields
end

local function remove_request(op)
  if op and op ~= '' then redis.call('HDEL', REQUESTS, op) end
end

-- A worker polls only its own record. A raised revision makes it read its gang's record.
local function raise_revisions(workers)
  for _, worker in ipairs(workers) do
    if redis.call('EXISTS', WORKER .. worker) == 1 then
      redis.call('HINCRBY', WORKER .. worker, 'revision', 1)
      update_worker_snapshot(worker)
    end
  end
end

-- Writes the gang and the new membership into the records of these workers.
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
    return decision.gang .. ' is not an unused gang id'
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
  local fields = {gang = decision.gang, workers = decision.workers, formed = true,
    dissolved = false}
  append_event('gang', with_rule(decision, fields), decision.extra)
end

-- Deletes all fields of an instance. `row` is its decoded row.
local function delete_instance(decision, gang, instance, row, workers)
  local key = GANG .. gang
  for _, rank in ipairs(row.ranks) do
    redis.call('HDEL', key, 'report:' .. instance .. ':' .. rank)
  end
  redis.call('HDEL', key, 'instance:' .. instance)
  redis.call('HDEL', MOVES, instance)
  append_event('desired', {gang = gang, resident = instance, job = row.job, role = 'idle',
    core = false, tier = 'absent', generation = row.generation, epoch = row.epoch,
    reason = decision.rule, pinned = false, workers = workers, from_role = row.role,
    from_job = row.job, token = args.token, op = decision.request_id or ''}, decision.extra)
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
  local fields = {gang = decision.gang, workers = workers, formed = false, dissolved = true}
  append_event('gang', with_rule(decision, fields), decision.extra)
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
      return decision.instance .. ' is at generation ' .. before.generation
        .. ' and epoch ' .. before.epoch .. ' already'
    end
    local retained_ranks = {}
    for _, rank in ipairs(decision.ranks) do retained_ranks[rank] = true end
    for _, rank in ipairs(before.ranks) do
      if not retained_ranks[rank] then
        redis.call('HDEL', key, 'report:' .. decision.instance .. ':' .. rank)
      end
    end
  else
    local gang, number = string.match(decision.instance, '^(.+)%.(%d+)$')
    if gang ~= decision.gang or tonumber(number) < tonumber(row[3]) then
      return decision.instance .. ' is not an unused instance id of ' .. decision.gang
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
