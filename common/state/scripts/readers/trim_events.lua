-- uses: readers
-- Frees what every reader has read, but for what has just happened. A reader that has been silent
-- for too long, which counts while this mesh is up, holds nothing back any more; nor does anybody
-- who is behind once there are too many events. Who comes back then is told that history is lost.
local recent = string.format('%.0f-0', NOW - a.keep_ms)
local least, crowded = recent, redis.call('XLEN', EVENTS) > a.most
for name, text in pairs(hash(READERS)) do
  local row = cjson.decode(text)
  local silent = NOW - math.max(row.seen_ms, a.up_since_ms) > a.gone_ms
  if not row.left and below(row.at, recent) and (silent or crowded) then
    row.left = true
    keep_reader(name, row)
    event('reader_gone', {reader = name, where = row.where, at = row.at, seen_ms = row.seen_ms,
      reason = silent and 'it is silent' or 'there are too many events'})
  elseif not row.left and below(row.at, least) then
    least = row.at
  end
end
local last = redis.call('XREVRANGE', EVENTS, '(' .. least, '-', 'COUNT', 1)[1]
if not last then return cjson.encode({trimmed = 0}) end
redis.call('SET', TRIMMED, last[1])
return cjson.encode({trimmed = redis.call('XTRIM', EVENTS, 'MINID', least)})
