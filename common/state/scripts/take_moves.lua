-- The moves that this leader has not taken yet. A leader that ends before it acted leaves them to
-- the next.
local seen = replayed()
if seen then return seen end
if not leads(a.election, a.token) then return fenced('the leader of ' .. a.election) end
local taken = {}
for op, move in pairs(hash(MESH .. ':moves')) do
  local asked = cjson.decode(move)
  if asked.taker ~= a.token then
    asked.taker = a.token
    redis.call('HSET', MESH .. ':moves', op, cjson.encode(asked))
    asked.op = op
    taken[#taken + 1] = asked
  end
end
return done({moves = taken})
