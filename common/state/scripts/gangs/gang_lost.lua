-- The leader saw that a gang's worker has gone: its role process has gone with it.
if not leads(a.election, a.token) then return fenced('the leader of ' .. a.election) end
local key = MESH .. ':gang:' .. a.gang
if redis.call('EXISTS', key) == 0 then return cjson.encode({}) end
if redis.call('HGET', key, 'actual_state') ~= 'lost' then
  redis.call('HSET', key, 'actual_state', 'lost', 'actual_role', 'idle', 'detail', a.reason,
    'changed_ms', NOW)
  event('lost', {gang = a.gang, reason = a.reason})
end
return cjson.encode({})
