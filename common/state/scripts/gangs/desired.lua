-- The leader's decision about one gang. It also settles the moves that asked for it, and replaces
-- the one of this gang that is under way. With details it is a move itself, under way from now on.
local seen = replayed()
if seen then return seen end
if not leads(a.election, a.token) then return fenced('the leader of ' .. a.election) end
local key = MESH .. ':gang:' .. a.gang
if redis.call('EXISTS', key) == 0 then return refuse('not_found', 'there is no gang ' .. a.gang) end
local was = redis.call('HMGET', key, 'desired_role', 'desired_job')
local epoch = redis.call('HINCRBY', key, 'epoch', 1)
redis.call('HSET', key, 'desired_role', a.role, 'desired_job', a.job, 'desired_core', a.core,
  'pinned', a.pinned, 'changed_ms', NOW)
for op, move in pairs(hash(MESH .. ':moves')) do
  local asked = cjson.decode(move)
  if op == a.op or (asked.gang == a.gang and asked.role == a.role) then
    redis.call('HDEL', MESH .. ':moves', op)
  end
end
if a.details == '{}' then
  redis.call('HDEL', MESH .. ':moving', a.gang)
else
  redis.call('HSET', MESH .. ':moving',
    a.gang, cjson.encode({epoch = epoch, started_ms = NOW, details = a.details}))
end
event('desired', {gang = a.gang, role = a.role, job = a.job, core = a.core == '1', epoch = epoch,
  reason = a.reason, pinned = a.pinned == '1', from_role = was[1], from_job = was[2],
  token = a.token, op = a.op}, a.details)
return done({epoch = epoch})
