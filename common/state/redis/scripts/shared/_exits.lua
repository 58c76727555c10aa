-- Record of the last exit of each process, by its name.
local EXITS = MESH .. ':exits'

local function read_last_exit()
  local text = redis.call('HGET', EXITS, args.name)
  local row = text and cjson.decode(text) or {times = 0}
  row.name, row.job, row.code, row.why = args.name, args.job, args.code, args.why
  row.at_ms, row.final, row.log = NOW, args.final, args.log
  -- without an event this exit was counted before
  if args.emit_event then row.times = row.times + args.exit_count end
  row.error = args.error
  return row
end

local function record_exit(row)
  redis.call('HSET', EXITS, args.name, cjson.encode(row))
  if args.emit_event then
    append_event('process_ended', {name = args.name, code = args.code, why = args.why,
      job = args.job, times = row.times, count = args.exit_count, final = args.final,
      log = args.log, error = args.error})
  end
end
