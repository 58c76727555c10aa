-- The leader will not do what was asked, and says why.
if not leads(a.election, a.token) then return fenced('the leader of ' .. a.election) end
if redis.call('HDEL', MESH .. ':moves', a.move) == 1 then
  event('move_declined', {op = a.move, reason = a.reason})
end
return cjson.encode({})
