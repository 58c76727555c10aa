-- The last end of a process, by its name.
local ENDED = MESH .. ':ended'

local function last_end()
  local known = redis.call('HGET', ENDED, a.name)
  local row = known and cjson.decode(known) or {times = 0}
  row.name, row.job, row.code, row.why = a.name, a.job, a.code, a.why
  row.at_ms, row.final, row.log = NOW, a.final, a.log
  if a.event then row.times = row.times + a.count end -- else it was counted when it was told
  row.error = a.error
  return row
end

local function tell_end(row)
  redis.call('HSET', ENDED, a.name, cjson.encode(row))
  if a.event then
    event('process_ended', {name = a.name, code = a.code, why = a.why, job = a.job,
      times = row.times, count = a.count, final = a.final, log = a.log, error = a.error})
  end
end
