-- uses: readers
-- Frees what every reader has read, but for what has just happened. A reader that has been silent
-- for too long, which counts while this mesh is up, holds nothing back any more; nor does anybody
-- who is behind once there are too many events. Who comes back then is told that history is lost.
-- Rows of steps go too, once a checkpoint covers them and the job's recorder has written them down.
local STEPS = 500 -- of a job at a time, so that no script takes long

local function trim_steps(job, recorded)
  local prefix = '{' .. job .. '}'
  local covered = tonumber(redis.call('HGET', prefix .. ':job', 'covered') or '-1')
  local last = math.min(covered - 1, recorded) -- the checkpoint's own row may yet be asked for
  local freed = 0
  for _, id in ipairs(redis.call('ZRANGE', prefix .. ':steps', 0, STEPS - 1)) do
    local row = redis.call('HMGET', prefix .. ':step:' .. id, 'step', 'committed_ms')
    if tonumber(row[1]) > last or tonumber(row[2]) > NOW - a.keep_ms then break end
    redis.call('DEL', prefix .. ':step:' .. id)
    redis.call('ZREM', prefix .. ':steps', id)
    freed = freed + 1
  end
  return freed
end

local recent = string.format('%.0f-0', NOW - a.keep_ms)
local least, crowded, steps = recent, redis.call('XLEN', EVENTS) > a.most, 0
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
  local job = string.match(name, '^recorder/(.+)$')
  if job then steps = steps + trim_steps(job, row.step or 0) end
end
local last = redis.call('XREVRANGE', EVENTS, '(' .. least, '-', 'COUNT', 1)[1]
if not last then return cjson.encode({trimmed = 0, steps = steps}) end
redis.call('SET', TRIMMED, last[1])
return cjson.encode({trimmed = redis.call('XTRIM', EVENTS, 'MINID', least), steps = steps})
