-- uses: groups
-- A finished group, whose bytes are durable, may train.
local seen = replayed()
if seen then return seen end
if not holds(a.shard, a.token) then return fenced(a.shard) end
local row = hash(group_key(a.group))
if row.state ~= 'open' or row.shard ~= a.shard then
  return refuse('refused', 'group ' .. a.group .. ' is not open at ' .. a.shard)
end
redis.call('HSET', group_key(a.group), 'digest', a.digest, 'nbytes', a.nbytes,
  'min_version', a.min_version, 'scored', a.scored)
move(a.group, 'open', 'ready')
progressed(JOB)
event('ready', {job = a.job, group = a.group, samples = tonumber(row.samples), scored = a.scored,
  digest = a.digest, by = a.shard})
return done({ready = true})
