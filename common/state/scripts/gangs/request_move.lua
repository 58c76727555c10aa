-- A person asks for a move; it stays on record until a leader has written the desired role or
-- declined it.
local seen = replayed()
if seen then return seen end
redis.call('HSET', MESH .. ':moves',
  a.op, cjson.encode({gang = a.gang, role = a.role, asked_ms = NOW}))
event('move_requested', {gang = a.gang, role = a.role, op = a.op})
return done({requested = true})
