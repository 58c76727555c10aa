-- uses: readers
-- Frees what every reader has read, but for what has just happened. A reader that has been silent
-- for too long, which counts while this mesh is up, holds nothing back any more; nor does anybody
-- who is behind once there are too many events. Who comes back then is told that history is lost.
-- Rows of steps go too, once a checkpoint covers them and the job's recorder has written them down.
local STEPS = 500 -- of a job at a time, so that no script takes long

local function trim_steps(job, recorded)
  local prefix = '{' .. job .. '}'
  local covered = tonumber(redis.call('HGET', prefix .. ':job', 'checkpointed_version') or '-1')
  local last = math.min(covered - 1, recorded) -- the checkpoint's own row may yet be asked for
  local freed = 0
  for _, id in ipairs(redis.call('ZRANGE', prefix .. ':steps', 0, STEPS - 1)) do
    local row = redis.call('HMGET', prefix .. ':step:' .. id, 'step', 'committed_ms')
    if tonumber(row[1]) > last or tonumber(row[2]) > NOW - args.keep_ms then break end
    redis.call('DEL', prefix .. ':step:' .. id)
    redis.call('ZREM', prefix .. ':steps', id)
    freed = freed + 1
  end
  return freed
end

local recent = string.format('%.0f-0', NOW - args.keep_ms)
local least, crowded, steps = recent, redis.call('XLEN', EVENTS) > args.most, 0
for name, text in pairs(read_hash(READERS)) do
  local row = cjson.decode(text)
  local silent = NOW - math.max(row.last_seen_ms, args.up_since_ms) > args.gone_ms
  if not row.has_left and is_before(row.cursor, recent) and (silent or crowded) then
    row.has_left = true
    write_reader(name, row)
    append_event('reader_gone', {reader = name, where = row.location, at = row.cursor,
      seen_ms = row.last_seen_ms,
      reason = silent and 'it is silent' or 'there are too many events'})
  elseif not row.has_left and is_before(row.cursor, least) then
    least = row.cursor
  end
  local job = string.match(name, '^recorder/(.+)$')
  if job then steps = steps + trim_steps(job, row.step or 0) end
end
local last = redis.call('XREVRANGE', EVENTS, '(' .. least, '-', 'COUNT', 1)[1]
if not last then return cjson.encode({trimmed = 0, steps = steps}) end
redis.call('SET', TRIMMED, last[1])
return cjson.encode({trimmed = redis.call('XTRIM', EVENTS, 'MINID', least), steps = steps})
