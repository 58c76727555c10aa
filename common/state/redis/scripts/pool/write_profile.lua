-- Writes a profile over the revision that its writer has read; answers the stored one if that has
-- changed. Beyond `max_count` profiles, the one that was written longest ago is removed.
local previous = previous_reply()
if previous then return previous end

local key = MESH .. ':profiles'
local stored = redis.call('HGET', key, args.key)
local row = stored and cjson.decode(stored) or {revision = 0, profile = '{}'}
if row.revision ~= args.revision then
  return reply_unchanged({is_written = false, revision = row.revision, profile = row.profile})
end
if not stored then
  local count, oldest, oldest_ms = 0, nil, nil
  for name, text in pairs(read_hash(key)) do
    local written_ms = cjson.decode(text).written_ms
    count = count + 1
    if not oldest_ms or written_ms < oldest_ms then oldest, oldest_ms = name, written_ms end
  end
  if count >= args.max_count then redis.call('HDEL', key, oldest) end
end
redis.call('HSET', key, args.key, cjson.encode({
  revision = row.revision + 1, written_ms = args.written_ms or NOW, profile = args.profile}))
return reply({is_written = true, revision = row.revision + 1, profile = args.profile})
