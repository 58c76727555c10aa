-- One result per tag: who evaluates again after a crash changes nothing.
if not holds(a.name, a.token) then return fenced(a.name) end
local row = cjson.encode({tag = a.tag, step = a.step, at_ms = NOW, by = a.name, result = a.result})
local first = redis.call('HSETNX', KEYS[1] .. ':evaluations', a.tag, row) == 1
if first then event('evaluation', {job = a.job, tag = a.tag, step = a.step}, a.result) end
return cjson.encode({recorded = first})
