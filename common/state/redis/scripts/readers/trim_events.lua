-- uses: readers
-- Trims events that every reader has read and that are older than `keep_ms`. A reader that was
-- silent for `gone_ms` while the mesh was up no longer counts. Neither does a lagging one if there
-- are more than `most` events; it learns on its return that history is lost.
local MAX_STEPS = 500 -- per job and call, so that no script takes long

-- Deletes rows of steps that a checkpoint covers and that the job's recorder has saved.
local function trim_steps(job, recorded)
  local prefix = '{' .. job .. '}'
  local covered = tonumber(redis.call('HGET', prefix .. ':job', 'checkpointed_version') or '-1')
  local last = math.min(covered - 1, recorded) -- the checkpoint's own row may still be read
  local deleted = 0
  for _, id in ipairs(redis.call('ZRANGE', prefix .. ':steps', 0, MAX_STEPS - 1)) do
    local row = redis.call('HMGET', prefix .. ':step:' .. id, 'step', 'committed_ms')
    if tonumber(row[1]) > last or tonumber(row[2]) > NOW - args.keep_ms then break end
    redis.call('DEL', prefix .. ':step:' .. id)
    redis.call('ZREM', prefix .. ':steps', id)
    deleted = deleted + 1
  end
  return deleted
end

local recent = string.format('%.0f-0', NOW - args.keep_ms)
local min_id, is_crowded, steps = recent, redis.call('XLEN', EVENTS) > args.most, 0
for name, text in pairs(read_hash(READERS)) do
  local row = cjson.decode(text)
  local is_silent = NOW - math.max(row.last_seen_ms, args.up_since_ms) > args.gone_ms
  if not row.has_left and is_before(row.cursor, recent) and (is_silent or is_crowded) then
    row.has_left = true
    write_reader(name, row)
    append_event('reader_gone', {reader = name, where = row.location, at = row.cursor,
      seen_ms = row.last_seen_ms,
      reason = is_silent and 'it is silent' or 'there are too many events'})
  elseif not row.has_left and is_before(row.cursor, min_id) then
    min_id = row.cursor
  end
  local job = string.match(name, '^recorder/(.+)$')
  if job then steps = steps + trim_steps(job, row.step or 0) end
end
local last = redis.call('XREVRANGE', EVENTS, '(' .. min_id, '-', 'COUNT', 1)[1]
if not last then return cjson.encode({trimmed = 0, steps = steps}) end
redis.call('SET', TRIMMED, last[1])
return cjson.encode({trimmed = redis.call('XTRIM', EVENTS, 'MINID', min_id), steps = steps})
