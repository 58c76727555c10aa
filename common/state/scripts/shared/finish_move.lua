-- A move is complete: its gang does what was decided. Told once, and not of a move that another
-- decision about the gang has replaced.
if not leads(a.election, a.token) then return fenced('the leader of ' .. a.election) end
local moving = redis.call('HGET', MESH .. ':moving', a.gang)
if moving and cjson.decode(moving).epoch == a.epoch then
  redis.call('HDEL', MESH .. ':moving', a.gang)
  event('move', {finished_ms = NOW}, a.details)
end
return cjson.encode({})
