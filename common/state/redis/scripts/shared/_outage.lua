-- Recovery after Redis was unavailable for longer than a lease. All leases have expired, but no
-- process is to blame. Leases that were live at the start of the outage are live again for a grace
-- period. No name therefore changes hands.
local GRACE_MS = 10000

local function raise_epoch(away_ms)
  local epoch = redis.call('INCR', MESH .. ':epoch')
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', MESH .. ':entries', NOW - away_ms, NOW)) do
    local key = MESH .. ':entry:' .. name
    if redis.call('HGET', key, 'is_released') ~= '1' then
      redis.call('HSET', key, 'expires_ms', NOW + GRACE_MS)
      redis.call('ZADD', MESH .. ':entries', NOW + GRACE_MS, name)
    end
  end
  redis.call('SET', MESH .. ':outage_ms', NOW)
  append_event('epoch', {epoch = epoch, away_ms = away_ms})
  return epoch
end
