-- uses: readers
-- A reader has everything up to `at` where no crash takes it back, and, if it records a job, the
-- rows of its steps up to `step`. One that leaves holds the stream
-- no longer.
local row = reader(a.name)
local job = string.match(a.name, '^recorder/(.+)$')
if not row and job and redis.call('ZSCORE', MESH .. ':jobs:deleted', job)
  and redis.call('EXISTS', '{' .. job .. '}:job') == 0 then
  return cjson.encode({}) -- it was deleted, and its recorder has not ended yet
end
row = row or {since_ms = NOW}
row.at, row.done, row.where, row.seen_ms, row.left = a.at, a.at, a.where, NOW, a.left or nil
row.step = a.step
keep_reader(a.name, row)
return cjson.encode({})
