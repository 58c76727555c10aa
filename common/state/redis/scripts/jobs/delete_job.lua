-- A job that has ended is on record no more. Its rows go in pieces afterwards
-- (`delete_remaining_rows`): until the last is gone nobody gets its name. That it was deleted stays
-- known, so that no Redis seems to have lost it, and the weight store lets go of what it kept for
-- it.
local seen = previous_reply()
if seen then return seen end
local DELETED, KEPT = MESH .. ':jobs:deleted', 10000 -- names, the newest ones
local key = KEYS[1] .. ':job'
local phase = redis.call('HGET', key, 'phase')
if not phase then return reject('not_found', 'there is no job ' .. args.job) end
if not redis.call('ZSCORE', MESH .. ':jobs:ended', args.job) then
  return reject('refused', args.job .. ' has not ended: it is in phase ' .. phase)
end
local run_dir = redis.call('HGET', KEYS[1] .. ':submission', 'run_dir')
redis.call('DEL', key)
redis.call('DEL', KEYS[1] .. ':submission')
redis.call('ZREM', MESH .. ':jobs', args.job)
redis.call('ZREM', MESH .. ':jobs:ended', args.job)
redis.call('ZADD', MESH .. ':jobs:deleting', NOW, args.job)
redis.call('ZADD', DELETED, NOW, args.job)
local most = redis.call('ZCARD', DELETED) - KEPT
if most > 0 then
  for _, name in ipairs(redis.call('ZRANGE', DELETED, 0, most - 1)) do
    redis.call('ZREM', DELETED, name)
  end
end
redis.call('HDEL', MESH .. ':readers', 'recorder/' .. args.job)
for name, text in pairs(read_hash(MESH .. ':exits')) do
  if cjson.decode(text).job == args.job then redis.call('HDEL', MESH .. ':exits', name) end
end
append_event('deleted', {job = args.job, run_dir = run_dir, by = args.by})
return reply({deleted = true})
