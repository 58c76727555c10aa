-- uses: pool
-- What a person asks for stays on record until a leader has granted or declined it. A host that is
-- to be drained is marked at once and until it is gone: nothing new is placed there.
local seen = replayed()
if seen then return seen end
redis.call('HSET', REQUESTS, a.op, cjson.encode({kind = a.kind, worker = a.worker, role = a.role,
  job = a.job, host = a.host, asked_ms = NOW}))
if a.kind == 'drain' then redis.call('HSET', DRAINING, a.host, 'asked for') end
event(a.kind .. '_requested', {op = a.op, worker = a.worker, role = a.role, job = a.job,
  host = a.host})
return done({requested = true})
