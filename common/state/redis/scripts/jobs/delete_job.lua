-- A job that has ended is on record no more. Its rows go in pieces afterwards (`delete_rest`):
-- until the last is gone nobody gets its name. That it was deleted stays known, so that no Redis
-- seems to have lost it, and the weight store lets go of what it kept for it.
local seen = replayed()
if seen then return seen end
local DELETED, KEPT = MESH .. ':jobs:deleted', 10000 -- names, the newest ones
local key = KEYS[1] .. ':job'
local phase = redis.call('HGET', key, 'phase')
if not phase then return refuse('not_found', 'there is no job ' .. a.job) end
if not redis.call('ZSCORE', MESH .. ':jobs:ended', a.job) then
  return refuse('refused', a.job .. ' has not ended: it is in phase ' .. phase)
end
local run_dir = redis.call('HGET', KEYS[1] .. ':given', 'run_dir')
redis.call('DEL', key)
redis.call('DEL', KEYS[1] .. ':given')
redis.call('ZREM', MESH .. ':jobs', a.job)
redis.call('ZREM', MESH .. ':jobs:ended', a.job)
redis.call('ZADD', MESH .. ':jobs:deleting', NOW, a.job)
redis.call('ZADD', DELETED, NOW, a.job)
local most = redis.call('ZCARD', DELETED) - KEPT
if most > 0 then
  for _, name in ipairs(redis.call('ZRANGE', DELETED, 0, most - 1)) do
    redis.call('ZREM', DELETED, name)
  end
end
redis.call('HDEL', MESH .. ':readers', 'recorder/' .. a.job)
for name, text in pairs(hash(MESH .. ':ended')) do
  if cjson.decode(text).job == a.job then redis.call('HDEL', MESH .. ':ended', name) end
end
event('deleted', {job = a.job, run_dir = run_dir, by = a.by})
return done({deleted = true})
