-- uses: readers
-- A reader has everything up to `cursor` where no crash takes it back, and, if it records a job,
-- the rows of its steps up to `step`. One that leaves holds the stream no longer.
local row = read_reader(args.name)
local job = string.match(args.name, '^recorder/(.+)$')
if not row and job and redis.call('ZSCORE', MESH .. ':jobs:deleted', job)
  and redis.call('EXISTS', '{' .. job .. '}:job') == 0 then
  return cjson.encode({}) -- it was deleted, and its recorder has not ended yet
end
row = row or {joined_ms = NOW}
row.cursor, row.done, row.location, row.last_seen_ms, row.has_left = args.cursor, args.cursor,
  args.location, NOW, args.has_left or nil
row.step = args.step
write_reader(args.name, row)
return cjson.encode({})
