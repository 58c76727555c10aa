-- uses: pool
-- Sets why nothing new is placed on a host; an empty reason allows placement again and removes
-- pending drain requests. With `expected` only if the current reason equals it. Answers whether
-- anything changed.
local before = redis.call('HGET', DRAINING, args.host) or ''
if args.expected and before ~= args.expected then return cjson.encode({changed = false}) end
if args.reason ~= '' then
  redis.call('HSET', DRAINING, args.host, args.reason)
else
  redis.call('HDEL', DRAINING, args.host)
  for op, text in pairs(read_hash(REQUESTS)) do
    local request = cjson.decode(text)
    if request.kind == 'drain' and request.host == args.host then
      redis.call('HDEL', REQUESTS, op)
    end
  end
end
local changed = before ~= args.reason
if changed then append_event('host_marked', {host = args.host, why = args.reason}) end
return cjson.encode({changed = changed})
