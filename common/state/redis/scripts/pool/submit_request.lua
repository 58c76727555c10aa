-- uses: pool
-- What a person asks for stays on record until a leader has granted or declined it. A host that is
-- to be drained is marked at once and until it is gone: nothing new is placed there.
local seen = previous_reply()
if seen then return seen end
redis.call('HSET', REQUESTS, args.op, cjson.encode({kind = args.kind, worker = args.worker,
  role = args.role,
  job = args.job, host = args.host, requested_ms = NOW}))
if args.kind == 'drain' then redis.call('HSET', DRAINING, args.host, 'asked for') end
append_event(args.kind .. '_requested', {op = args.op, worker = args.worker, role = args.role,
  job = args.job,
  host = args.host})
return reply({requested = true})
