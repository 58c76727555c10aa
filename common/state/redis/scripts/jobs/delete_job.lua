-- Deletes the record of an ended job. `delete_remaining_rows` deletes its other rows in pieces; its
-- name stays reserved until then. The index of deleted jobs remains: the loss of a job's row is
-- then explained, and the weight store releases its data.
local previous = previous_reply()
if previous then return previous end
local DELETED, MAX_DELETED = MESH .. ':jobs:deleted', 10000 -- names; the oldest are removed
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
local excess = redis.call('ZCARD', DELETED) - MAX_DELETED
if excess > 0 then
  for _, name in ipairs(redis.call('ZRANGE', DELETED, 0, excess - 1)) do
    redis.call('ZREM', DELETED, name)
  end
end
redis.call('HDEL', MESH .. ':readers', 'recorder/' .. args.job)
for name, text in pairs(read_hash(MESH .. ':exits')) do
  if cjson.decode(text).job == args.job then redis.call('HDEL', MESH .. ':exits', name) end
end
append_event('deleted', {job = args.job, run_dir = run_dir, by = args.by})
return reply({deleted = true})
